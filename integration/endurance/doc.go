// Package endurance runs berth for a long time: thousands of pods and a million log lines, while
// daemons and monitors are killed. Tests run a selection by default, and everything in
// contrib/torture.
package endurance
