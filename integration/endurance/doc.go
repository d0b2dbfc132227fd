// Package endurance runs berth for long: thousands of pods and a million log lines,
// while daemons and monitors are killed. The tests of each change take a selection;
// contrib/torture takes the whole.
package endurance
