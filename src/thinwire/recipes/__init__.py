"""Named, complete trainings: model, data, optimizer, schedule, target and defaults."""
