"""The commands of `dbo-fx`, one file each; `frame` holds what they share."""
