"""What training changes outside of state_dict(): numbers in attributes, buffers that are not persistent, gradients."""
