"""Rules that read a recording: each takes the calls of one pattern."""
