"""Other libraries, met halfway. Nothing here imports them: what is not loaded needs no care."""
