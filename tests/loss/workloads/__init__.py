"""What is recorded and cut, each with the check of what a cut may leave."""
