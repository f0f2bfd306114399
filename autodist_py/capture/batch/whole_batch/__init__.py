"""Programs that mix the examples of a batch, made exact: layouts through the loss and through back-propagation."""
