package state

import (
	"testing"
	"time"
)

func TestCreationAfter(t *testing.T) {
	noon := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	tomorrow, yesterday := noon.AddDate(0, 0, 1), noon.AddDate(0, 0, -1)
	for name, tt := range map[string]struct {
		before []time.Time
		want   time.Time
	}{
		"the first":              {nil, noon},
		"the clock advanced":     {[]time.Time{yesterday}, noon},
		"the clock stood still":  {[]time.Time{noon}, noon.Add(1)},
		"the clock was set back": {[]time.Time{tomorrow, yesterday, tomorrow.Add(1)}, tomorrow.Add(2)},
	} {
		if got := CreationAfter(noon, tt.before); !got.Equal(tt.want) {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
	}
	if got := CreationAfter(time.Now(), nil); got != got.Round(0) {
		t.Error("the time has a monotonic reading, unlike times in records")
	}
}
