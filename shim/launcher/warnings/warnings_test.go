package warnings

import "testing"

// What libcontainer says while many things go wrong does not fill the reply, and is told once.
func TestWarnings(t *testing.T) {
	w := &List{}
	for range 2 * limit {
		w.Add("again")
	}
	if got := w.Take(); len(got) != limit {
		t.Errorf("%d warnings", len(got))
	}
	if got := w.Take(); got != nil {
		t.Errorf("they are told again: %q", got)
	}
}
