"""What a step would need, without running it or holding it in memory."""
