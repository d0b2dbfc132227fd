package launcher

import (
	"strings"
	"testing"
)

func TestHasConnection(t *testing.T) {
	const heading = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
	const listening = "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 5041 1 0000000000000000 100 0 0 10 0\n"
	for name, tt := range map[string]struct {
		table string
		want  bool
	}{
		"no socket": {"", false},
		"listening": {listening, false},
		"bound":     {strings.Replace(listening, " 0A ", " 07 ", 1), false},
		"in TIME_WAIT": {
			"   1: 0100007F:1F90 0100007F:CD3A 06 00000000:00000000 03:0000176F 00000000     0        0 0 3 0000000000000000\n", false},
		"not accepted": {
			"   1: 0100007F:1F90 0100007F:CD3A 01 00000000:00000000 00:00000000 00000000     0        0 0 1 0000000000000000 20 4 30 10 -1\n", false},
		"established": {listening +
			"   1: 0100007F:1F90 0100007F:CD3A 01 00000000:00000000 00:00000000 00000000     0        0 5042 1 0000000000000000 20 4 30 10 -1\n", true},
		"connecting": {
			"   0: 0153550A:CD3A 0253550A:1F90 02 00000001:00000000 01:00000064 00000000     0        0 5043 2 0000000000000000 100 0 0 1 7\n", true},
		"closed by the peer, IPv6": {"   0: 00000000000000000000000001000000:1F90 00000000000000000000000001000000:CD3A 08 " +
			"00000000:00000000 00:00000000 00000000     0        0 5044 1 0000000000000000 20 4 30 10 -1\n", true},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := hasConnection(strings.NewReader(heading + tt.table))
			if err != nil || got != tt.want {
				t.Errorf("hasConnection = %v, %v, want %v", got, err, tt.want)
			}
		})
	}
	if _, err := hasConnection(strings.NewReader(heading + "   0: 0100007F:1F90\n")); err == nil {
		t.Error("a cut line gave no error")
	}
}

func TestHasNoSocket(t *testing.T) {
	const four = "sockets: used 8\nTCP: inuse 0 orphan 0 tw 0 alloc 1 mem 0\nUDP: inuse 1 mem 0\n"
	for text, want := range map[string]bool{
		four: true,
		strings.Replace(four, "TCP: inuse 0", "TCP: inuse 1", 1): false,
		"TCP6: inuse 0\n": false, // of another protocol
		"TCP: inuse":      false,
		"":                false,
	} {
		if got := hasNoSocket(text, "TCP:"); got != want {
			t.Errorf("hasNoSocket(%q) = %v", text, got)
		}
	}
}
