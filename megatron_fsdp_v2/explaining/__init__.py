"""What ``explain`` says, and how it is found and shown."""
