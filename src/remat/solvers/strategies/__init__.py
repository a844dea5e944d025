"""What the field knows, one strategy a file: from keeping everything to rotor, DTR and genetic search."""
