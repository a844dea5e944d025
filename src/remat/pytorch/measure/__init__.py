"""What a step really does: its peak, its profile, its bits."""
