package failpoint

import (
	"regexp"
	"testing"

	"berth/internal/failpoint/points"
)

// Each point is in one place, and its name is a literal of the form that the package doc says.
func TestNames(t *testing.T) {
	all, err := points.Below("../..")
	if err != nil {
		t.Fatal(err)
	}
	form := regexp.MustCompile(`^[a-z]+(\.[a-z]+(-[a-z]+)*)+$`)
	places := map[string]string{}
	for _, p := range all {
		if p.Name == "" {
			t.Errorf("%s: the name is not a literal", p.Place)
			continue
		}
		if !form.MatchString(p.Name) {
			t.Errorf("%s: the name %q is not of the form area.what-happened", p.Place, p.Name)
		}
		if other := places[p.Name]; other != "" {
			t.Errorf("%s: the name %q is %s's", p.Place, p.Name, other)
		}
		places[p.Name] = p.Place
	}
	if len(places) < 50 {
		t.Errorf("only %d points were found", len(places))
	}
}
