"""The second arrow: what every op takes on this machine, and what plain eager's step needs."""
