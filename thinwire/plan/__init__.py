"""What an exchange costs before it is made: closed forms first, measured models later."""
