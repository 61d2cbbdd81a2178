"""Workers as Ray actors: cluster, placement, actors, and Ray's errors in plain words."""
