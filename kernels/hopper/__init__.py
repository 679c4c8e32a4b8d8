"""Flash attention in Gluon, for H100 and H200."""
