"""What is measured against whom; see README.md."""
