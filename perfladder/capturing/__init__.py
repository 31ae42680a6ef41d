"""What a stage received and returned, as files that a fresh process can replay; nothing is ever unpickled."""
