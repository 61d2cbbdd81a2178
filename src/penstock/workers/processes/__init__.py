"""Workers as processes of this machine, called over a socket pair."""
