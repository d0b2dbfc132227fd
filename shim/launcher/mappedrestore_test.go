package launcher

import (
	"strings"
	"testing"
)

// CRIU may have been taken over. It cannot repeat a step, change the order or leave one out.
func TestTakeStep(t *testing.T) {
	for steps, want := range map[string]string{
		"pre-restore setup-namespaces post-setup-namespaces post-restore pre-resume post-resume": "",
		"setup-namespaces setup-namespaces":                                       `the step "setup-namespaces" again`,
		"setup-namespaces post-setup-namespaces post-setup-namespaces":            `the step "post-setup-namespaces" again`,
		"setup-namespaces post-setup-namespaces pre-resume post-setup-namespaces": `the step "post-setup-namespaces" again`,
		"setup-namespaces post-setup-namespaces pre-resume pre-resume":            `the step "pre-resume" again`,
		"setup-namespaces pre-resume":                                             `the step "pre-resume" before "post-setup-namespaces"`,
		"post-setup-namespaces":                                                   `the step "post-setup-namespaces" before "setup-namespaces"`,
	} {
		b, due := new(mappedRestore), 0
		var err error
		for _, script := range strings.Fields(steps) {
			var now bool
			if now, err = b.takeStep(script); now {
				due++
			}
			if err != nil {
				break
			}
		}
		if want == "" && (err != nil || due != len(restoreSteps)) || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %d steps, %v", steps, due, err)
		}
	}
}
