"""Published results as data, beside what the planner says of them."""
