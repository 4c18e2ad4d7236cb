"""Linformer, Performer, FMM and Luna (chapter 8)."""
