"""What every mechanism promises (`contract`), and the inputs that show it (`cases`)."""
