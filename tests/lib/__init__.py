"""What the suites of Unbroken share."""
