"""Update rules, one a file, and the places where their state lives."""
