"""A user's own elastic script under faults: what happened, who noticed it when, and what was lost."""
