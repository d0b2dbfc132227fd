package pull

import (
	"os"
	"testing"

	"berth/internal/testutil"
)

// Another user could otherwise replace an image that pods trust.
func TestPreloadRefusesDirectoriesOfOthers(t *testing.T) {
	dir := t.TempDir()
	testutil.Must(t, os.Chmod(dir, 0o777))
	if err := onlyRootWrites(dir); err == nil {
		t.Error("accepted")
	}
}
