"""The Gracepoint operator: sees disruptions of gangs and tells the library in their pods."""
