"""Decision-making as sequence modeling, trained on recorded episodes. One file per method."""
