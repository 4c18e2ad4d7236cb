"""What pages use: claims, exercises, figures, sliders, and the solver of their regressions."""
