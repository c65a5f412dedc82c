"""The studio: a local web page over runs, grids, searches and learned models (`foresight studio`)."""
