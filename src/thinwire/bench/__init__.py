"""`thinwire bench`: our strategies and other systems, measured side by side in labs."""
