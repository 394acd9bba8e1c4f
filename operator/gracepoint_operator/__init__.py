"""The Gracepoint operator: sees disruptions of JobSets and tells the library in their pods."""
