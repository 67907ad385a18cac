"""What a training would gain from more machines, for every strategy, before anything is changed."""
