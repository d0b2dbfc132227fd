package launcher

import "testing"

func TestWarningsAreBoundedAndTakenOnce(t *testing.T) {
	t.Parallel()
	w := &warningList{}
	for range 2 * maxWarnings {
		w.add("again")
	}
	if got := w.take(); len(got) != maxWarnings {
		t.Errorf("take returns %d warnings, want %d", len(got), maxWarnings)
	}
	if got := w.take(); got != nil {
		t.Errorf("a second take returns %q", got)
	}
}
