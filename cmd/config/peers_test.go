package config

import (
	"strings"
	"testing"
)

func TestPeersOptionsFitTogether(t *testing.T) {
	t.Parallel()
	const files = "cert = '/c'\nkey = '/k'\nca = '/ca'\n"
	for _, c := range []struct{ name, text, wrong string }{
		{"off", "", ""},
		{"off with files", files, ""},
		{"complete", "listen = '0.0.0.0:4789'\nadvertise = '10.0.0.5:4789'\nseeds = ['nodes.example:4789', '10.0.0.6:4789']\n" + files, ""},
		{"IPv6", "listen = '[::]:4789'\nadvertise = '[fd00::5]:4789'\nseeds = ['[fd00::6]:4789']\n" + files, ""},
		{"a name to listen at", "listen = 'localhost:4789'\nadvertise = '10.0.0.5:4789'\n" + files, "peers.listen"},
		{"nothing advertised", "listen = '0.0.0.0:4789'\n" + files, "peers.advertise"},
		{"any address advertised", "listen = '0.0.0.0:4789'\nadvertise = '0.0.0.0:4789'\n" + files, "peers.advertise"},
		{"no port advertised", "listen = '0.0.0.0:4789'\nadvertise = '10.0.0.5'\n" + files, "peers.advertise"},
		{"no CA", "listen = '0.0.0.0:4789'\nadvertise = '10.0.0.5:4789'\ncert = '/c'\nkey = '/k'\n", "peers.ca"},
		{"seed without a port", "listen = '0.0.0.0:4789'\nadvertise = '10.0.0.5:4789'\nseeds = ['nodes.example']\n" + files, "peers.seeds"},
		{"seed with the name of a port", "listen = '0.0.0.0:4789'\nadvertise = '10.0.0.5:4789'\nseeds = ['nodes.example:http']\n" + files, "peers.seeds"},
		{"small bandwidth", "listen = '0.0.0.0:4789'\nadvertise = '10.0.0.5:4789'\nupload_bandwidth = 1\n" + files, "peers.upload_bandwidth"},
		{"least bandwidth", "listen = '0.0.0.0:4789'\nadvertise = '10.0.0.5:4789'\nupload_bandwidth = 1048576\n" + files, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			_, err := Parse("config.toml", []byte("[peers]\n"+c.text))
			if (err != nil) != (c.wrong != "") || err != nil && !strings.Contains(err.Error(), c.wrong) {
				t.Errorf("got %v, want an error about %q", err, c.wrong)
			}
		})
	}
}
