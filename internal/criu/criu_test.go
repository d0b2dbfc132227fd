package criu

import (
	"errors"
	"testing"
)

func TestParseVersion(t *testing.T) {
	for _, tt := range []struct {
		output string
		want   Version
		bad    bool
	}{
		{output: "Version: 4.1.1\n", want: Version{4, 1, 1}},
		{output: "Version: 4.2\nGitID: v4.2\n", want: Version{4, 2, 0}},
		{output: "Version: 3.17.1\n", want: Version{3, 17, 1}},
		{output: "Version: 4.x\n", bad: true},
		{output: "Version: -4.1\n", bad: true},
		{output: "Version:\n", bad: true},
		{output: "", bad: true},
	} {
		t.Run(tt.output, func(t *testing.T) {
			got, err := ParseVersion(tt.output)
			if got != tt.want || (err != nil) != tt.bad {
				t.Errorf("ParseVersion = %v, %v", got, err)
			}
		})
	}
}

func TestVersionGate(t *testing.T) {
	for v, good := range map[Version]bool{
		{3, 17, 1}: false, {4, 1, 0}: false, {4, 0, 9}: false,
		{4, 1, 1}: true, {4, 2, 0}: true, {5, 0, 0}: true,
	} {
		if err := v.Check(); (err == nil) != good {
			t.Errorf("Check of %s = %v", v, err)
		}
	}
}

func TestLocate(t *testing.T) {
	if _, err := Locate("/nonexistent/criu"); !errors.Is(err, ErrMissing) {
		t.Errorf("Locate = %v", err)
	}
	if path, err := Locate("/bin/sh"); err != nil || path != "/bin/sh" {
		t.Errorf("Locate = %q, %v", path, err)
	}
}
