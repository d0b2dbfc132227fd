// Command berth-net provides berth's built-in network as a CNI plugin for any runtime that executes
// plugins. Install it as /opt/cni/bin/berth-net. The daemon berth calls the plugin as a function
// instead.
package main

import "berth/cni/berthnet"

func main() { berthnet.Main() }
