"""Linformer, Performer, FMM and Luna (appendix D)."""
