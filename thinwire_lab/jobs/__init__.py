"""Reference trainings: each job is a model and its data; one loop trains them all."""
