"""What is the same for the Trainers of transformers and of PaddleFormers: runs, resume points, links, exports."""
