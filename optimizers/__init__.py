"""Update rules, one per file, and the places where their state lives."""
