"""Every message that torchLoom sends or stores, one module per conversation, and the table of subjects.

Messages are frozen, tagged structs, encoded as JSON. Decoding validates them. The identity of a rank is part of the
*subject* on which it publishes, where the server enforces it, and never part of the payload; a payload names only the
incarnation. Unknown fields are ignored, so that an older reader understands a newer writer. An unknown tag, a wrong
type or a value out of bounds is refused.

    from      to       union        messages                                         delivery
    rank      weaver   Report       Hello Goodbye Knobs Saved SaveFailed Resumed     durable
                                    Joined Regrouped Healed Discarded (torchft)      durable
    rank      weaver   Reply        StepReport Ready Applied Ordered                 requested until it arrives
    rank      weaver   Beat                                                          once a second
    agent     weaver   NodeBeat                                                      once a second, and on a change
    anyone    weaver   Fact         DeviceFailed DeviceRecovered DeviceWarned        durable
                                    RankExited Inspected
    operator  weaver   Ask          Fail SetKnobs Revert Steer Submit Cancel …       answered with Done or No
    viewer    weaver   Look         QueryCluster QueryCurves QueryKnobs …            answered with a view
    weaver    rank     Command      Welcome Introduce Muted Farewell QueryStep
                                    Propose Verdict Order
    weaver    agent    NodeCommand  Prepare Launch Halt Examine Inspect Dismiss      repeated until beats confirm it
    weaver    lighthouse  Evict                                                      repeated until beats confirm it
    lighthouse  weaver, ranks  LighthouseBeat                                        once a second, and on a change
    weaver    log      Entry        Records: the state of the weaver is their fold
"""
