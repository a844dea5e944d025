"""How the nouns are written to files and read again: versioned JSON, checked on load, written whole or not at all."""
