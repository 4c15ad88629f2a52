"""Training state outside of state_dict(): numbers in attributes, non-persistent buffers, gradients."""
