"""What ops take: equations timed alone, rates of the device, and what XLA says of compiled programs."""
