"""Translation, German to English."""
