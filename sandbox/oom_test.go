package sandbox

import "testing"

// Kills count once, whether a scrape or the exit of the container finds them.
func TestOOMKillsCountOnce(t *testing.T) {
	t.Parallel()
	var o oomCounter
	expect := func(what string, want uint64) {
		t.Helper()
		if got := o.sum(); got != want {
			t.Errorf("%s: %d kills, want %d", what, got, want)
		}
	}
	o.begin("new", 0)
	o.begin("adopted", 5)
	o.update("adopted", 5)
	expect("kills before this daemon", 0)
	o.update("new", 2)
	o.update("new", 2)
	o.update("adopted", 6)
	expect("two scrapes", 3)
	o.end("new", 3, true)
	expect("a kill of init", 4)
	o.update("new", 3)
	expect("a scrape after the exit", 4)
	o.end("adopted", 0, false)
	expect("an exit without a cgroup", 4)
	o.begin("quick", 0)
	o.end("quick", 0, true)
	expect("a kill only in the exit record", 5)
	o.end("absent", 0, true)
	expect("a kill while no daemon ran", 6)
	o.begin("counted", 0)
	o.update("counted", 1)
	o.end("counted", 0, true)
	expect("a counted kill in the exit record", 7)
}
