"""Longer experiments, whose results the chapters show: a module for each chapter."""
