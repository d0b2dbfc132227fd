package nearest

import "testing"

func TestOf(t *testing.T) {
	t.Parallel()
	known := []string{"capabilities", "skip_verify", "ca"}
	for name, want := range map[string]string{"capabilityes": "capabilities", "skip-verify": "skip_verify", "cert": "ca", "": "ca"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := Of(name, known); got != want {
				t.Errorf("got %q, want %q", got, want)
			}
		})
	}
	if got := Of("x", nil); got != "" {
		t.Errorf("without known names: got %q", got)
	}
}

func TestDistance(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		a, b string
		want int
	}{{"", "", 0}, {"abc", "", 3}, {"", "abc", 3}, {"kitten", "sitting", 3}, {"flaw", "lawn", 2}, {"same", "same", 0}} {
		t.Run(tc.a+"/"+tc.b, func(t *testing.T) {
			t.Parallel()
			if got := Distance(tc.a, tc.b); got != tc.want {
				t.Errorf("got %d, want %d", got, tc.want)
			}
		})
	}
}
