"""What several rooms need and none of them is about: files, inputs, processes, words for messages."""
