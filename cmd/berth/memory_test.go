package main

import (
	"testing"

	"berth/internal/pages"
)

// The program runs on when its pages were given back.
func TestRunsWithoutItsPages(t *testing.T) {
	if err := pages.ReleaseStartup(); err != nil {
		t.Fatal(err)
	}
	if _, err := run("config", "default"); err != nil {
		t.Error(err)
	}
}
